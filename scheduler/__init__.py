"""Pure scheduling: events in, frozen plans out. Standard library only; time is always an argument."""
