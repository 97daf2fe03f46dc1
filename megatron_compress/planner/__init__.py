"""What a step will take, and which compressor shortens it most, from a model's shape and measured speeds."""
