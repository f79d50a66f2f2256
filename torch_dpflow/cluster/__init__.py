"""Data loading that many training jobs share: the services, their state machines, and the client in each job."""
