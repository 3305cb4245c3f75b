"""Rows of measurements and the features made of them: the public table, campaigns, rows that a user measured."""
