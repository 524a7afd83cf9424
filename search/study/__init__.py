"""What a study is and what it keeps."""
