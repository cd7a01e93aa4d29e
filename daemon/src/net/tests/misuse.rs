//! What strangers and broken peers may send.
