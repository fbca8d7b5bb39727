package main

import (
	"os"
	"strings"
	"testing"
)

func TestItRunsAlone(*testing.T) { main() }

func TestReadmeShowsThisProgram(t *testing.T) {
	program, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, code, _ := strings.Cut(string(program), "package main")
	if !strings.Contains(string(readme), "package main"+code) {
		t.Error("README.md shows another program: copy examples/gradient/main.go")
	}
}
