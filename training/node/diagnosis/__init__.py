"""Finding out why: a debugger on one rank, profiles of all of them, and who fell behind when a run hangs."""
