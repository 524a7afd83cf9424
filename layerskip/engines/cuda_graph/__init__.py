"""The engine that records its forwards as CUDA graphs."""
