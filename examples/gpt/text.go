package main

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// corpus is text as tokens: numbers of its characters, from 0. A character is a byte.
type corpus struct {
	characters        []byte // by token
	training, heldOut []byte // tokens
}

// loadCorpus returns the text of --data.
func loadCorpus(data string) corpus {
	wanted := func(name string) bool { return !strings.HasPrefix(name, ".") }
	if data == "" {
		root := must(exec.Command("go", "env", "GOROOT").Output())
		data, wanted = filepath.Join(strings.TrimSpace(string(root)), "src"), isSource
	}
	var files [][]byte
	check(filepath.WalkDir(data, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case path != data && entry.IsDir() && !wanted(entry.Name()):
			return filepath.SkipDir
		case entry.IsDir() || path != data && !(wanted(entry.Name()) && entry.Type().IsRegular()):
			return nil
		}
		text, err := os.ReadFile(path)
		files = append(files, text)
		return err
	}))
	return newCorpus(files)
}

// isSource reports whether a file or a folder has Go that is neither a command nor a test.
func isSource(name string) bool {
	if name == "cmd" || name == "vendor" || name == "testdata" {
		return false
	}
	ext := filepath.Ext(name)
	return ext == "" || ext == ".go" && !strings.HasSuffix(name, "_test.go")
}

// newCorpus holds out one file in twenty, or the last tenth of fewer.
func newCorpus(files [][]byte) (c corpus) {
	for i, text := range files {
		if i%20 == 19 {
			c.heldOut = append(c.heldOut, text...)
		} else {
			c.training = append(c.training, text...)
		}
	}
	if c.heldOut == nil {
		end := len(c.training) - len(c.training)/10
		c.training, c.heldOut = c.training[:end], c.training[end:]
	}
	var token [256]byte
	for character := range 256 {
		b := byte(character)
		if bytes.IndexByte(c.training, b) >= 0 || bytes.IndexByte(c.heldOut, b) >= 0 {
			token[b] = byte(len(c.characters))
			c.characters = append(c.characters, b)
		}
	}
	for _, text := range [][]byte{c.training, c.heldOut} {
		for i, character := range text {
			text[i] = token[character]
		}
	}
	return c
}
