"""The vendor's own wheels over the double of the SDK: they judge what it asks for."""
