# Written by interlock.doors.grpc.generate from interlock/v1/gateway.proto; not by hand.
# ruff: noqa
# fmt: off
# pyright: basic
import grpc.aio as _aio
from interlock.doors.grpc.v1 import gateway_pb2 as _wire

class GatewayStub:
    def __init__(self, channel: _aio.Channel) -> None: ...
    Discover: _aio.UnaryUnaryMultiCallable[_wire.DiscoverRequest, _wire.DiscoverResponse]
    Describe: _aio.UnaryUnaryMultiCallable[_wire.DescribeRequest, _wire.Tool]
    Load: _aio.UnaryUnaryMultiCallable[_wire.LoadRequest, _wire.LoadResponse]
    Surface: _aio.UnaryUnaryMultiCallable[_wire.SurfaceRequest, _wire.SurfaceResponse]
    Select: _aio.UnaryUnaryMultiCallable[_wire.SelectRequest, _wire.SelectResponse]
    Recommend: _aio.UnaryUnaryMultiCallable[_wire.RecommendRequest, _wire.RecommendResponse]
    Invoke: _aio.UnaryUnaryMultiCallable[_wire.InvokeRequest, _wire.CallResult]
    Run: _aio.StreamStreamMultiCallable[_wire.RunRequest, _wire.RunEvent]
    Calls: _aio.UnaryUnaryMultiCallable[_wire.CallsRequest, _wire.CallsResponse]
    Top: _aio.UnaryUnaryMultiCallable[_wire.TopRequest, _wire.TopResponse]
    Status: _aio.UnaryUnaryMultiCallable[_wire.StatusRequest, _wire.StatusResponse]
    Trace: _aio.UnaryUnaryMultiCallable[_wire.TraceRequest, _wire.TraceResponse]
    Part: _aio.UnaryUnaryMultiCallable[_wire.PartRequest, _wire.PartResponse]
    Cancel: _aio.UnaryUnaryMultiCallable[_wire.CancelRequest, _wire.CancelResponse]
    Resume: _aio.UnaryUnaryMultiCallable[_wire.ResumeRequest, _wire.CallResult]
