"""The environment type 'webshop': shopping on a server of WebShop."""
