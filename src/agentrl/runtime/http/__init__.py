"""HTTP of every package: guarded servers, clients that respect proxies, and bounded replies."""
