"""A run as a page: the server behind it (`app`, `launch`), and the same page as one file (`report`)."""
