"""What a site does to measurements, and how it is undone."""
