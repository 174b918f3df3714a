"""The gRPC contract of a policy engine elsewhere, written by `interlock.doors.grpc.generate`."""
