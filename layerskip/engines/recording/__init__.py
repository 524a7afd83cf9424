"""Work recorded as CUDA graphs: the recorder, the pool, and the time that recorded work takes."""
