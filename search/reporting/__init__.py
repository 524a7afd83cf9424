"""What a study shows of itself: a page, Markdown, tables, the dashboard's figures; all made of its storage alone."""
