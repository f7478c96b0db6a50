"""From a file's text to typed sections: positions, overrides, old spellings, hints."""
