package main

import (
	"fmt"
	"os"

	"github.com/euryale-ml/euryale/internal/env"
)

// misspelling is the most letters by which a word may differ from the one that was meant.
const misspelling = 2

// nearest returns the candidate that a misspelt word may mean, "" for none.
func nearest(word string, candidates []string) string {
	best, distance := "", misspelling+1
	for _, c := range candidates {
		if d := editDistance(word, c); d < distance {
			best, distance = c, d
		}
	}
	return best
}

// editDistance is how many letters to insert, delete or replace to make b of a.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1) // of the matrix, for the letters of a so far
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		corner := row[0] // the one before row[j] in the row above
		row[0] = i + 1
		for j := range len(b) {
			replace := corner
			if a[i] != b[j] {
				replace++
			}
			corner = row[j+1]
			row[j+1] = min(replace, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// warnOfUnread says which variables nothing reads. A job would go on without what they ask for.
func warnOfUnread(s *streams) {
	for _, name := range env.Unread(os.Environ()) {
		advice := "see euryale doctor"
		if meant := nearest(name, env.Names()); meant != "" {
			advice = fmt.Sprintf("did you mean %s?", meant)
		}
		fmt.Fprintf(s.err, "euryale: nothing reads the variable %s: %s\n", name, advice)
	}
}
