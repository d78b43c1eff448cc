"""Adapters in host memory and in slots: layout, packed blocks, arena, registry, leases. Knows no layer, no kernel."""
