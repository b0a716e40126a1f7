"""The web page on a run: its server (`app`, `server`), and the same page as one HTML file (`one_file`)."""
