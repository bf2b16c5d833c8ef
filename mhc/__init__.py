"""Train transformers under different residual topologies and tell, with evidence, which of them stays stable.

``mhc.residual`` is the subject and needs jax and flax alone; ``mhc.train.run`` is the trainer. Importing ``mhc``
itself imports neither.
"""
