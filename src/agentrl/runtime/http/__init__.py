"""HTTP of every room: guarded servers, clients that respect proxies, and bounded replies."""
