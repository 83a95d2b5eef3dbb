"""Images as data: files to pixels, captions, and the two kinds that are drawn or come with a library."""
