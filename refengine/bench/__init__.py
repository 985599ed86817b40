"""`refengine bench`: what a turn costs, with the prefix cache and without, beside the machine's ceilings and other engines.
Floor 7."""
