"""One step: a prompt, a model call, a tool call. No Temporal, no HTTP."""
