"""What happens, in which order: the flows, and the command line that starts them and reads their records."""
