"""Atomic writes, a write lock per directory, safetensors files and JSON manifests."""
