"""What crosses a process boundary: frozen values, camelCase on the wire."""
