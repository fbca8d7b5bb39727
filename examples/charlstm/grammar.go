package main

import (
	"math"
	"math/rand/v2"
	"strings"
)

// The words of the grammar. Nouns and verbs have a form for one and one for several.
var (
	nouns = [][2]string{{"cat", "cats"}, {"dog", "dogs"}, {"bird", "birds"}, {"child", "children"},
		{"teacher", "teachers"}, {"mouse", "mice"}, {"sailor", "sailors"}, {"king", "kings"}}
	verbs = [][2]string{{"sees", "see"}, {"follows", "follow"}, {"likes", "like"},
		{"watches", "watch"}, {"hears", "hear"}, {"calls", "call"}}
	adjectives = strings.Fields("old small quiet happy grey young")
	places     = strings.Fields("near behind before without")
)

// writer writes sentences, and adds up the information of its choices, in nats.
type writer struct {
	strings.Builder
	*rand.Rand
	information float64
}

// one returns a number below n.
func (w *writer) one(n int) int {
	w.information += math.Log(float64(n))
	return w.IntN(n)
}

// noun writes a noun and its words, and returns its number: 1 for several.
func (w *writer) noun() int {
	number := w.one(2)
	w.WriteString([]string{"the ", "many "}[number])
	if w.one(2) == 1 {
		w.WriteString(adjectives[w.one(len(adjectives))] + " ")
	}
	w.WriteString(nouns[w.one(len(nouns))][number])
	return number
}

// sentence writes "many old cats near the king see the dog.".
func (w *writer) sentence() {
	number := w.noun()
	if w.one(2) == 1 {
		w.WriteString(" " + places[w.one(len(places))] + " ")
		w.noun() // the verb does not agree with this one
	}
	w.WriteString(" " + verbs[w.one(len(verbs))][number] + " ")
	w.noun()
	w.WriteString(".\n")
}

// sentences returns a text of at least n characters, and how many nats of information it has.
func sentences(n int) (text string, information float64) {
	w := &writer{Rand: rand.New(rand.NewPCG(seed, 0))}
	for w.Len() < n {
		w.sentence()
	}
	return w.String(), w.information
}
