"""What tests share: data directories, wires, servers, clients, and the checks around every test."""
