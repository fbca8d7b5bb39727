package models

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
)

// Draw is how a token is chosen for a row that has tokens.
func Draw(s Sampling, logits []float32, r *rand.Rand, tokens ...int) (int, error) {
	return s.draw(s.penalized(logits, &text{tokens: tokens}), r, new(candidates))
}

// ReadConfig reads the text of a config.json.
func ReadConfig(text []byte) (c Config, err error) {
	var o object
	err = json.Unmarshal(text, &o)
	return c, errors.Join(err, c.read(&o))
}
