"""Turns a file's text into typed sections: positions, overrides, old spellings, suggestions."""
