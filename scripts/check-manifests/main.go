// Reads Kubernetes manifests on standard input and decodes each strictly into the API's own Go types, as a client does before it contacts a
// server: an unknown kind, an unknown or duplicate field, or a value of the wrong type fails.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

func check(in io.Reader) (int, error) {
	if err := monitoring.AddToScheme(scheme.Scheme); err != nil {
		return 0, err
	}
	options := json.SerializerOptions{Yaml: true, Strict: true}
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, options)
	documents := yaml.NewYAMLReader(bufio.NewReader(in))
	count := 0
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return count, nil
		}
		if err != nil {
			return count, err
		}
		if isEmpty(document) {
			continue
		}
		if _, kind, err := decoder.Decode(document, nil, nil); err != nil {
			return count, fmt.Errorf("document %d (%v): %w", count+1, kind, err)
		}
		count++
	}
}

// Whether a document contains only comments.
func isEmpty(document []byte) bool {
	for _, line := range bytes.Split(document, []byte("\n")) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && !bytes.Equal(line, []byte("---")) {
			return false
		}
	}
	return true
}

func main() {
	count, err := check(os.Stdin)
	if err == nil && count == 0 {
		err = errors.New("no manifest on standard input")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Printf("%d objects are valid\n", count)
}
