"""ThunderAgent operator: watches workers and policies, feeds the endpoint pickers."""
