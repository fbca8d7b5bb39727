package models

// Draw is how a token is chosen.
var Draw = Sampling.draw
