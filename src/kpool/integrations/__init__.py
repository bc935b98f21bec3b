"""Adapters for the ecosystems people use; each is imported only when asked for, and needs its own extra.

`kpool.integrations.transformers` (extra `hf`): `use_kpool(model)`.
`kpool.integrations.megatron` (extra `megatron`): `KPoolDSAttention`, `KPoolDSAIndexer`.
"""
