package main

import (
	"crypto/rand"
	"fmt"
)

// tokenCmd makes a secret.
type tokenCmd struct{}

// Help is what --help says below the title.
func (tokenCmd) Help() string {
	return `The ranks of a job on several machines prove to each other that they know the text in
EURYALE_TOKEN. Whoever can listen at rank 0's address before rank 0 does, or can read what ranks
send without EURYALE_TLS=1, can test guesses of the text on his own machine, as fast as he likes.
So it must be random, as this one is, of 130 bits.

Example:

	export EURYALE_TOKEN=$(euryale token)`
}

// Run prints the secret.
func (tokenCmd) Run(s *streams) error {
	_, err := fmt.Fprintln(s.out, rand.Text())
	return err
}
