"""Messages and client of the gRPC contract, as interlock.doors.grpc.generate writes them from gateway.proto."""
