"""What institutions agree on before a job runs between them: identities, certificates, roster, site policy, evidence.

Nothing here opens a connection. docs/provisioning.md walks through it for three institutions.
"""
