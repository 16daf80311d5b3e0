"""What deploys: the servers of a team on one machine (`stack/`), and the same as containers and on Kubernetes."""
