package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// corpus is text as tokens, which are numbers of its characters, from 0. A character is a byte.
type corpus struct {
	characters        []byte // by token
	training, heldOut []byte // tokens
}

// synthetic is the value of --data for tokens without a text.
const synthetic = "synthetic"

// heldOutFile is how many files there are for each that is held out, and heldOutPart the part of the
// text, where there are fewer.
const (
	heldOutFile = 20
	heldOutPart = 10
)

// loadCorpus returns the text of --data.
func loadCorpus(data string, seed uint64) (corpus, error) {
	if data == synthetic {
		return newCorpus([][]byte{process(seed)}), nil
	}
	wanted := isVisible
	var err error
	if data == "" {
		data, err = standardLibrary()
		wanted = isSource
	}
	var files [][]byte
	if err == nil {
		files, err = readFiles(data, wanted)
	}
	if err != nil {
		return corpus{}, fmt.Errorf("--data: %w", err)
	}
	return newCorpus(files), nil
}

// standardLibrary returns the folder of the sources of the installed Go.
func standardLibrary() (string, error) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOROOT: %w: name a file or a folder, or use --data %s", err, synthetic)
	}
	return filepath.Join(strings.TrimSpace(string(root)), "src"), nil
}

// isSource reports whether a file or a folder has Go that is neither a command nor a test.
func isSource(path string) bool {
	switch name := filepath.Base(path); name {
	case "cmd", "vendor", "testdata":
		return false
	default:
		return filepath.Ext(name) == "" || filepath.Ext(name) == ".go" && !strings.HasSuffix(name, "_test.go")
	}
}

// isVisible reports whether a file or a folder is not hidden.
func isVisible(path string) bool { return !strings.HasPrefix(filepath.Base(path), ".") }

// readFiles returns a file, or those of a folder whose names, and those of their folders, are wanted.
func readFiles(root string, wanted func(path string) bool) (files [][]byte, err error) {
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case path != root && !wanted(path):
			if entry.IsDir() {
				return filepath.SkipDir
			}
			return nil
		case entry.IsDir() || path != root && !entry.Type().IsRegular():
			return nil
		}
		text, err := os.ReadFile(path)
		files = append(files, text)
		return err
	})
	return files, err
}

// process returns random tokens, of which three in four repeat the one two places before: attention
// finds it, and a bigram model cannot.
func process(seed uint64) []byte {
	const n, vocabulary = 1 << 17, 32
	r := rand.New(rand.NewPCG(seed, n))
	text := make([]byte, n)
	for i := range text {
		text[i] = '@' + byte(r.IntN(vocabulary))
		if i >= 2 && r.IntN(4) > 0 {
			text[i] = text[i-2]
		}
	}
	return text
}

// newCorpus divides files into those to train on and others.
func newCorpus(files [][]byte) corpus {
	var c corpus
	for i, text := range files {
		if i%heldOutFile == heldOutFile-1 {
			c.heldOut = append(c.heldOut, text...)
		} else {
			c.training = append(c.training, text...)
		}
	}
	if c.heldOut == nil {
		end := len(c.training) - len(c.training)/heldOutPart
		c.training, c.heldOut = c.training[:end], c.training[end:]
	}
	var present [256]bool
	for _, text := range [][]byte{c.training, c.heldOut} {
		for _, character := range text {
			present[character] = true
		}
	}
	var token [256]byte
	for character, is := range present {
		if is {
			token[character] = byte(len(c.characters))
			c.characters = append(c.characters, byte(character))
		}
	}
	for _, text := range [][]byte{c.training, c.heldOut} {
		for i, character := range text {
			text[i] = token[character]
		}
	}
	return c
}

// hash tells texts apart.
func (c corpus) hash() string {
	h := sha256.New()
	for _, part := range [][]byte{c.characters, c.training, c.heldOut} {
		fmt.Fprintln(h, len(part))
		h.Write(part)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// check returns an error if there is no text for a context.
func (c corpus) check(context int) error {
	if least := context + 2; min(len(c.training), len(c.heldOut)) < least {
		return fmt.Errorf("--data: %d characters to train on and %d held out: a context of %d needs %d of each", len(c.training), len(c.heldOut), context, least)
	}
	return nil
}

// text returns tokens as text.
func (c corpus) text(tokens []int) string {
	text := make([]byte, len(tokens))
	for i, token := range tokens {
		text[i] = c.characters[token]
	}
	return strings.ToValidUTF8(string(text), "\uFFFD")
}

// first returns the token with which the model begins to write: a line break if there is one.
func (c corpus) first() int { return max(0, bytes.IndexByte(c.characters, '\n')) }

// windows are samples of a text: places from which context tokens are read, and as many targets,
// which are the tokens behind them.
type windows struct {
	text    []byte
	starts  []int
	context int
}

// random returns a batch of a step, the same for every layout.
func (c corpus) random(seed uint64, step, batch, context int) windows {
	r := rand.New(rand.NewPCG(seed, uint64(step)))
	starts := make([]int, batch)
	for i := range starts {
		starts[i] = r.IntN(len(c.training) - context)
	}
	return windows{c.training, starts, context}
}

// evaluation returns windows that are spread evenly over the text that was held out.
func (c corpus) evaluation(n, context int) windows {
	starts := make([]int, n)
	for i := range starts {
		starts[i] = i * (len(c.heldOut) - context - 1) / max(1, n-1)
	}
	return windows{c.heldOut, starts, context}
}

// part returns the windows from start to end.
func (w windows) part(start, end int) windows {
	w.starts = w.starts[start:end]
	return w
}

// tokens returns all tokens of the windows, and all targets.
func (w windows) tokens() (tokens, targets []int) {
	for _, start := range w.starts {
		for i := range w.context {
			tokens = append(tokens, int(w.text[start+i]))
			targets = append(targets, int(w.text[start+i+1]))
		}
	}
	return tokens, targets
}

// bigram returns the loss of windows for a model that knows how often each character follows each
// other one in the text to train on.
func (c corpus) bigram(of windows) float64 {
	vocabulary := len(c.characters)
	pairs, singles := make([]float64, vocabulary*vocabulary), make([]float64, vocabulary)
	for i, token := range c.training[1:] {
		before := int(c.training[i])
		pairs[before*vocabulary+int(token)]++
		singles[before]++
	}
	loss := 0.0
	tokens, targets := of.tokens()
	for i, token := range tokens {
		// One is added to each count, so that no pair is impossible.
		loss -= math.Log((pairs[token*vocabulary+targets[i]] + 1) / (singles[token] + float64(vocabulary)))
	}
	return loss / float64(len(tokens))
}
