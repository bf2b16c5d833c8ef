"""Implement the kinds of one stream that combine depth otherwise than by x + F(x): attention, averages, learned shares.

One file each: ``attn_res``, ``denseformer``, ``laurel``. Their rows are in ``mhc.kinds``, their maths in
``mhc.residual.reads``.
"""
