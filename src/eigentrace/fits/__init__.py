"""The fits that methods return: their scores, features and files."""
