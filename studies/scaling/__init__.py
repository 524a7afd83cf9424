"""How a study grows with its workers: what the storages cost, and whether many workers search as well as one."""
