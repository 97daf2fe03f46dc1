"""Published models become megatron-core checkpoints: read (`gguf_file`, `hf_folder`), rename, cut and check."""
