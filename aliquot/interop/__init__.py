"""Readers and writers of the files of other systems."""
