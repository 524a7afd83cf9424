"""What is behind a storage URL: a file, a database server, or a proxy in front of one."""
