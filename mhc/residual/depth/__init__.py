"""Implement the kinds of one stream that say more of depth than x + F(x): attention over it, averages, learned shares.

One file each: ``attn_res``, ``denseformer``, ``laurel``. Their rows are in ``mhc.kinds``, their maths in
``mhc.residual.reads``.
"""
