package models

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
)

// Draw is how a token is chosen.
func Draw(s Sampling, logits []float32, r *rand.Rand) (int, error) {
	return s.draw(logits, r, new(candidates))
}

// ReadConfig reads the text of a config.json.
func ReadConfig(text []byte) (c Config, err error) {
	var o object
	err = json.Unmarshal(text, &o)
	return c, errors.Join(err, c.read(&o))
}
