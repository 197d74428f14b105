"""The wire: OpenAI over HTTP, protobuf over gRPC, and one error table for each."""
