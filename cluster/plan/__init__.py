"""`tandem plan`: what runs where, and whether it fits, before there is a cluster."""
