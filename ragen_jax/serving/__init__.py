"""The endpoint of agent programs, in rooms: play, http, wire, conversation, engine and rollouts, from the top down."""
