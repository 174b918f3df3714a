"""Descriptions of HTTP tools: an OpenAPI document, and single tools."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
ORDER: Json = {"type": "object", "properties": {"id": {"type": "integer"}}}
SHOP: Json = {
    "openapi": "3.1.0",
    "info": {"title": "Shop", "version": "1.0.0"},
    "servers": [{"url": "https://shop.example.com"}],
    "paths": {
        "/orders": {
            "get": {
                "operationId": "listOrders",
                "summary": "Every order of the shop.",
                "responses": {"200": {"description": "orders", "content": {"application/json": {"schema": ORDER}}}},
            },
            "post": {
                "operationId": "placeOrder",
                "summary": "Place an order with the shop.",
                "responses": {"200": {"description": "it", "content": {"application/json": {"schema": ORDER}}}},
            },
        }
    },
}
RATE: Json = {
    "name": "rate", "description": "Rate of one currency.", "method": "GET", "path": "/rate/{of}",
    "input_schema": {
        "type": "object",
        "properties": {"of": {"type": "string", "description": "currency", "examples": ["CHF"]}},
        "required": ["of"],
    },
}  # fmt: skip
READS: Json = {"tools": {"rate": {"mutation_class": "read_only", "result_schema": {"type": "object"}}}}
