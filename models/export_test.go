package models

import "math/rand/v2"

// Draw is how a token is chosen.
func Draw(s Sampling, logits []float32, r *rand.Rand) (int, error) {
	return s.draw(logits, r, new(candidates))
}
